"""Run plans on real engines and record the responses, without judging them."""

"""The kinds of scenarios, a module each: what is sent, when it cannot occur, and the proof that it occurred."""

"""The mutants, by the part of an engine or a deployment that they damage."""

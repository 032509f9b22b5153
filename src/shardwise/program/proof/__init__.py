"""The three parts of the proof that a program is sound."""

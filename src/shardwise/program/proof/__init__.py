"""The four parts of the proof that a program is sound."""

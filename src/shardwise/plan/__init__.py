"""How: the plan, its one-line form and its validation."""

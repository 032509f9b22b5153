"""How long: prices a program in seconds and bytes."""

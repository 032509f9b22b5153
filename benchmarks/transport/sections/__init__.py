"""One family of measurements per module; a new one is a module here and a line in measure.SECTIONS."""

"""When: actions, lowering and schedules, free of torch."""

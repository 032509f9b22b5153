"""On what: devices, memory and network tiers as data."""

"""Do: transports, regrid and the executor."""

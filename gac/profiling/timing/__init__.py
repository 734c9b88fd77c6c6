"""Time one point so that the number can be trusted; which GPU, driver and libraries it was timed on."""

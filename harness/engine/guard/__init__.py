"""What is put on the path of engines and routers, so that they answer to the run's key alone."""

"""Matrix of engine settings whose outputs are compared with the plain run's."""

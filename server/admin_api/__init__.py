"""The admin API: its routes, its own listener, and ``nwor-server mode`` for one or many replicas."""

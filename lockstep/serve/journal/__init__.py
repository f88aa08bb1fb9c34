"""Journal of answers on disk, from which a restarted server goes on."""

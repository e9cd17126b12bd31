"""Facts of the outside world, each with its source: models, clusters, accelerators, workloads."""

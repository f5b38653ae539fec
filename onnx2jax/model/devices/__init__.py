"""Pipeline parallelism: stages, microbatches, and reports of placement, collectives and cost."""

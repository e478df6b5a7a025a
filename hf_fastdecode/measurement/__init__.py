"""What benches and workloads share: models to measure, timing, and rows that are written as they come."""

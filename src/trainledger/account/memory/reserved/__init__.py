"""What the caching allocator keeps reserved: the run of a stage as requests in order, replayed."""

"""Files and memory: durable writes, page-aligned buffers, planned reads, the shard file and its writer."""

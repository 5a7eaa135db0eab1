"""Every document that is written, defined once: reading, refusal and schema come from the definition."""

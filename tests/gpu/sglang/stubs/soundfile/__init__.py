"""Stand-in: the server imports it for speech, which nothing here is about."""

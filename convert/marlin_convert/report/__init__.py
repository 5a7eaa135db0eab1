"""Pages for eyes: each one HTML file without network or scripts, beside the JSON that it is drawn from."""

"""HTTP service: many streams adapt on one network."""

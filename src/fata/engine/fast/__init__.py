"""The same step captured, compiled and in bfloat16."""

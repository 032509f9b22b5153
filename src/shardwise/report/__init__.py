"""Show: tables, traces and progress."""

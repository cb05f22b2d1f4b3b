"""Studies: fixed questions with their commands, tables and figures."""

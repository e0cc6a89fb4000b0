"""What was planned, merged and measured, as tables, records and pictures for people."""

"""The soak: a real deployment of the pipeline through a day of events, judged by a plain model."""

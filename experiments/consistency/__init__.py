"""Where does a loss across tokenizers lead, if text, models and optimiser are exact? Known sources, nothing sampled."""

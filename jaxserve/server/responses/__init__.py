"""``/v1/responses``, OpenAI's newer dialect, without memory: each call brings its whole conversation."""

"""Run language models on your own machine: one profile, one API, one yardstick for every engine."""

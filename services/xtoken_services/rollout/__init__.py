"""The rollout worker: completes prompts with the student and puts the completions as rows."""

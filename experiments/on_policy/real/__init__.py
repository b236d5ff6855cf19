"""On-policy distillation of pretrained models, on a task whose answers a script knows: infinitives of French verbs."""

"""What `launch.generate` is made of: its config, prompts, weights and report."""

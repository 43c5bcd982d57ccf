"""What a run leaves behind and shows: JSON lines, summary, progress display, wandb. Subscribers of events all."""

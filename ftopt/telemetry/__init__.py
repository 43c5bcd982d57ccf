"""What a run leaves behind and shows: JSON lines, the summary, the progress display, wandb. Subscribers of events all."""

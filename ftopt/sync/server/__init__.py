"""The coordinator process: HTTP, WebSockets and the journal around the coordinator machine."""

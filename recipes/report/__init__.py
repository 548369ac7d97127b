"""Tables and figures of committed results, the paper's next to ours."""

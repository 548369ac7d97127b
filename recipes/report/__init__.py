"""Tables and figures of committed results, the paper's beside ours."""

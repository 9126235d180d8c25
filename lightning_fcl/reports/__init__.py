"""From a run folder to figures and one self-contained page; tables over many runs."""

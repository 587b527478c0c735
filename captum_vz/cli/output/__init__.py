"""How commands write: tables and progress in a terminal, plain lines elsewhere, and files."""

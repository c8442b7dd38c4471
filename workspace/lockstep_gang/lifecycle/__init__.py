"""What should happen next. Pure: state of the gang, what was observed and the time go in, orders and records come out."""

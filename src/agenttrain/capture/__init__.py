"""Model calls become Turns: `render` makes and reads ids, `recorder` answers calls, `store` keeps every record."""

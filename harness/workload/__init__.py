"""What will be sent: the requests of each cell and the scripts of the scenarios. Nothing is started here."""

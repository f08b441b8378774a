package policy

// allowed says whether a character may be part of a policy's name.
func allowed(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
}

// ValidName reports whether name could be a policy's: 1 to 128 characters of A-Z a-z 0-9 . _ -
func ValidName(name string) bool {
	for _, r := range name {
		if !allowed(r) {
			return false
		}
	}
	return name != "" && len(name) <= maxName
}

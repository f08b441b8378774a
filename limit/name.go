package limit

// MaxPolicyName is the longest name of a policy, in bytes.
const MaxPolicyName = 128

// InPolicyName reports whether a character may be part of a policy's name: A-Z a-z 0-9 . _ -
func InPolicyName(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
}

// ValidPolicyName reports whether name could be a policy's: 1 to MaxPolicyName characters, each InPolicyName.
func ValidPolicyName(name string) bool {
	for _, r := range name {
		if !InPolicyName(r) {
			return false
		}
	}
	return name != "" && len(name) <= MaxPolicyName
}

package limit

import (
	"strconv"
	"strings"

	"github.com/weirlimit/weir/algo"
)

// inlinePrefix is the prefix of the scopes of inline limits.
const inlinePrefix = "inline/"

// candidateSuffix is the suffix of the scopes of candidates.
const candidateSuffix = "/candidate"

// CandidateScope returns the scope of a policy's candidate. It has a slash, which no policy's name has.
func CandidateScope(policy string) string { return policy + candidateSuffix }

// ShareOf returns the policy, or the namespace of inline limits, to whose share of the store the keys of a scope
// belong.
func ShareOf(scope string) (share string, inline bool) {
	rest, inline := strings.CutPrefix(scope, inlinePrefix)
	if !inline {
		return strings.TrimSuffix(scope, candidateSuffix), false
	}
	for range 4 {
		_, rest, _ = strings.Cut(rest, "/")
	}
	_, namespace, _ := strings.Cut(rest, "//")
	return namespace, true
}

// InlineScope returns the scope of an inline limit, for ring.Hash; that of a policy is its name. It does not depend on
// Limit and Capacity, so that a change of them applies to existing states. It has a slash, which no policy's name has.
//
// In namespaces with the prefix GubernatorNamespace it depends on the algorithm only, as in Gubernator: a changed
// window applies to existing states, too.
func InlineScope(namespace string, l *algo.Limit) string {
	if namespace == "" {
		namespace = "default"
	}
	if strings.HasPrefix(namespace, GubernatorNamespace) {
		l = &algo.Limit{Algorithm: l.Algorithm}
	}
	slots := l.Slots
	if l.Algorithm == algo.SlidingWindow && slots == 0 {
		slots = algo.DefaultSlots
	}
	zone := ""
	if l.Zone != nil && l.Zone.String() != "UTC" {
		zone = l.Zone.String()
	}
	// The namespace is last, because it is the only free text. ShareOf parses the scope.
	var room [128]byte
	b := append(room[:0], inlinePrefix...)
	b = append(strconv.AppendInt(b, int64(l.Algorithm), 10), '/')
	b = append(strconv.AppendInt(b, int64(l.Window), 10), '/')
	b = append(strconv.AppendInt(b, int64(slots), 10), '/')
	b = strconv.AppendInt(b, int64(l.Period), 10)
	if l.Anchor > 1 { // 0 stands for 1
		b = strconv.AppendInt(append(b, '-'), int64(l.Anchor), 10)
	}
	b = append(append(append(b, '/'), zone...), "//"...)
	return string(append(b, namespace...))
}

package limit

import (
	"strconv"
	"strings"

	"github.com/weirlimit/weir/algo"
)

// inlinePrefix begins the scopes of inline limits.
const inlinePrefix = "inline/"

// candidateSuffix ends the scopes of candidates.
const candidateSuffix = "/candidate"

// CandidateScope is the scope of the states that a policy's candidate is decided under. It holds a slash, which no policy's name does.
func CandidateScope(policy string) string { return policy + candidateSuffix }

// ShareOf is whose share of the store a scope's keys belong to: a policy's, or that of a namespace of inline limits.
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

// InlineScope is the scope that ring.Hash is given for the keys of a limit sent along, where it is the name for those of a
// policy. Limit and capacity have no part in it, so that changing them applies to live state. It holds a slash, which no
// policy's name does, so it never meets one of those.
//
// In namespaces that begin with GubernatorNamespace the algorithm alone counts, as Gubernator has it: a window that changes applies to
// live state, too.
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
	// The namespace, the only free text, comes last. ShareOf takes this apart.
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

package limit

import (
	"fmt"
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
	period := strconv.Itoa(int(l.Period))
	if l.Anchor > 1 { // 0 stands for 1
		period += "-" + strconv.Itoa(int(l.Anchor))
	}
	return fmt.Sprintf(inlinePrefix+"%d/%d/%d/%s/%s//%s", l.Algorithm, l.Window, slots, period, zone, namespace)
}

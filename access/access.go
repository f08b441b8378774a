// Package access says who may do what: callers, known by a token or by the names in a certificate, the roles they have,
// and the policies and namespaces they may use. It reads that from a file, strictly, and answers questions about it.
//
// It knows no server: who asks, and that a certificate was verified, is for others to find out. It makes no promise about
// what was let in before the file changed: a List is what it was when it was read.
package access

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"strings"
)

// Role is something that a caller may do. Roles do not imply one another.
type Role uint8

// The roles. Open is what everybody may do, known or not.
const (
	Open     Role = 0
	Check    Role = 1 << 0 // check, acquire, renew, release, reserve, commit, cancel, with the policies that are given
	Refund   Role = 1 << 1 // give back what others were charged: refund and reset, with the policies that are given
	Read     Role = 1 << 2 // status, policies, metrics
	Topology Role = 1 << 3 // the ring with the seed of its hash, which lets a client aim at partitions
	Admin    Role = 1 << 4 // change the cluster: the gossip's keys
)

// roleNames are the roles as files spell them.
func roleNames() []string { return []string{"check", "refund", "read", "topology", "admin"} }

// String returns the names of the roles in r, separated by commas.
func (r Role) String() string {
	var names []string
	for i, name := range roleNames() {
		if r&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "open"
	}
	return strings.Join(names, ",")
}

// Caller is somebody who is known. It does not change.
type Caller struct {
	Name       string // as the file has it, for logs
	Roles      Role
	policies   patterns
	namespaces patterns
}

// Everybody is who a caller is where nobody is asked: it has all roles, and may use every policy and namespace.
func Everybody() *Caller {
	return &Caller{Name: "everybody", Roles: Check | Refund | Read | Topology | Admin, policies: patterns{""}, namespaces: patterns{""}}
}

// Has reports whether the caller has all the roles in r. Nobody, a nil Caller, has only Open.
func (c *Caller) Has(r Role) bool { return r == Open || c != nil && c.Roles&r == r }

// MayUsePolicy reports whether the caller may use a policy, in the roles that it has.
func (c *Caller) MayUsePolicy(name string) bool { return c != nil && c.policies.match(name) }

// MayUseNamespace reports whether the caller may send limits along, in a namespace; empty stands for "default".
func (c *Caller) MayUseNamespace(name string) bool {
	if name == "" {
		name = "default"
	}
	return c != nil && c.namespaces.match(name)
}

// patterns are names, each with a byte in front of it: '=' for the name itself, none for all that begin like it. So "" is
// everything.
type patterns []string

func (p patterns) match(name string) bool {
	for _, one := range p {
		if exact, ok := strings.CutPrefix(one, "="); ok {
			if exact == name {
				return true
			}
		} else if strings.HasPrefix(name, one) {
			return true
		}
	}
	return false
}

// List is an access file: everybody who is known. It is immutable and safe for concurrent use.
type List struct {
	// MetricsOpen has the metrics shown to everybody.
	MetricsOpen bool
	callers     []*Caller
	tokens      []token        // in no order that says anything
	identities  map[string]int // index into callers
}

type token struct {
	sum   [sha256.Size]byte
	owner *Caller
}

// Callers is how many callers there are.
func (l *List) Callers() int { return len(l.callers) }

// ByToken returns whose token this is, nil when it is nobody's. It takes as long for a token that is nearly right as for
// any other.
func (l *List) ByToken(text string) *Caller {
	sum := sha256.Sum256([]byte(text))
	var found *Caller
	for i := range l.tokens {
		if subtle.ConstantTimeCompare(sum[:], l.tokens[i].sum[:]) == 1 {
			found = l.tokens[i].owner
		}
	}
	return found
}

// ByIdentities returns who has one of the identities of a verified certificate, the first in the file when several have;
// nil when nobody has.
func (l *List) ByIdentities(identities []string) *Caller {
	first := len(l.callers)
	for _, id := range identities {
		if i, ok := l.identities[id]; ok {
			first = min(first, i)
		}
	}
	if first == len(l.callers) {
		return nil
	}
	return l.callers[first]
}

// Identities are the names in a certificate as files spell them: those in its subject alternative names, and the common
// name of its subject.
func Identities(dns, uris []string, commonName string) []string {
	ids := make([]string, 0, len(dns)+len(uris)+1)
	for _, name := range dns {
		ids = append(ids, "dns:"+name)
	}
	for _, uri := range uris {
		ids = append(ids, "uri:"+uri)
	}
	if commonName != "" {
		ids = append(ids, "cn:"+commonName)
	}
	return ids
}

// NewToken makes a token of 256 random bits. Only its Hash belongs in a file.
func NewToken() string {
	var b [32]byte
	rand.Read(b[:]) // never fails
	return "weir_" + base64.RawURLEncoding.EncodeToString(b[:])
}

// Hash is a token as files have it. It is not salted and not slow, because tokens of NewToken cannot be guessed.
func Hash(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hashPrefix + hex.EncodeToString(sum[:])
}

const hashPrefix = "sha256:"

// Denial is why somebody may not do something.
type Denial struct {
	// Known is set when it is clear who asks, and that this is not for them. Otherwise it is not clear, or not proven.
	Known   bool
	Reason  string // a word for it, one of the constants below, for counting
	Message string // what is wrong and what would be right, fit for the one who asks
}

// The reasons of a Denial.
const (
	NoCredentials   = "no_credentials"   // neither a token nor a certificate
	BadToken        = "bad_token"        // a token that is nobody's, or what is no token
	UnknownIdentity = "unknown_identity" // a verified certificate that is nobody's
	WrongRole       = "wrong_role"
	WrongPolicy     = "wrong_policy" // a policy, or a namespace, that is not the caller's
	WrongPlace      = "wrong_place"  // from another host, without any proof
)

func (d *Denial) Error() string { return d.Message }

package auth

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/limit"
)

// Role is a set of rights. No role implies another.
type Role uint8

// The roles. RoleOpen is that of methods and paths that need no authentication.
const (
	RoleOpen Role = 0
	// RoleCheck is to check, acquire, renew, release, reserve, extend, commit and cancel, with the policies that are given.
	RoleCheck    Role = 1 << 0
	RoleRefund   Role = 1 << 1 // give back what others were charged: refund and reset, with the policies that are given
	RoleRead     Role = 1 << 2 // status, policies, metrics
	RoleTopology Role = 1 << 3 // the ring with its hash key, which lets a client aim at partitions
	RoleAdmin    Role = 1 << 4 // change the cluster: the gossip's keys
	RoleKeys     Role = 1 << 5 // see which keys are used, with the policies that are given: keys are the callers' data
	// RoleOverrides is to see and change the overrides of the policies that are given, while nodes run.
	RoleOverrides Role = 1 << 7
	// RoleCharge is to charge costs without being refused, which can bring anybody's key into debt, with the policies that are given.
	RoleCharge Role = 1 << 6
)

// roleNames are the roles' names in an access file.
func roleNames() []string {
	return []string{"check", "refund", "read", "topology", "admin", "keys", "charge", "overrides"}
}

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

// Caller is an entry of the access file. It is immutable.
type Caller struct {
	Name   string // as the file has it, for logs
	Roles  Role   // of all grants together
	grants []grant
}

// grant is some roles and what they are for.
type grant struct {
	roles                Role
	policies, namespaces patterns
}

// everybody is the caller of a node without an access file: it has all roles, and may use every policy and namespace.
func everybody() *Caller {
	const all = RoleCheck | RoleRefund | RoleRead | RoleTopology | RoleAdmin | RoleKeys | RoleCharge | RoleOverrides
	return &Caller{Name: "everybody", Roles: all, grants: []grant{{all, patterns{""}, patterns{""}}}}
}

// Has reports whether the caller has all the roles in r. A nil Caller has only RoleOpen.
func (c *Caller) Has(r Role) bool { return r == RoleOpen || c != nil && c.Roles&r == r }

// MayUsePolicy reports whether the caller may use a policy in a role.
func (c *Caller) MayUsePolicy(r Role, name string) bool {
	return c.granted(r, func(g grant) patterns { return g.policies }, name)
}

// MayUseNamespace reports whether the caller may use inline limits of a namespace in a role; empty stands for "default".
func (c *Caller) MayUseNamespace(r Role, name string) bool {
	return c.granted(r, func(g grant) patterns { return g.namespaces }, cmp.Or(name, "default"))
}

// may reports whether the caller may use a target in a role.
func (c *Caller) may(r Role, t *limit.Target) bool {
	if t.Limit != nil {
		return c.MayUseNamespace(r, t.Namespace)
	}
	return c.MayUsePolicy(r, t.Policy)
}

// granted reports whether one of the caller's grants has the role and, in the list that of chooses, the name.
func (c *Caller) granted(r Role, of func(grant) patterns, name string) bool {
	return c != nil && slices.ContainsFunc(c.grants, func(g grant) bool { return g.roles&r == r && of(g).match(name) })
}

// patterns are names, each with a byte in front of it: '=' for the name itself, none for all that begin like it. So "" is
// everything.
type patterns []string

func (p patterns) match(name string) bool {
	return slices.ContainsFunc(p, func(one string) bool {
		exact, is := strings.CutPrefix(one, "=")
		return is && exact == name || !is && strings.HasPrefix(name, one)
	})
}

// Callers is the content of an access file: every known caller. It is immutable and safe for concurrent use.
type Callers struct {
	// MetricsOpen makes the metrics readable without authentication.
	MetricsOpen bool
	callers     []*Caller
	tokens      []token        // in no order that says anything
	identities  map[string]int // index into callers
}

type token struct {
	sum     [sha256.Size]byte
	owner   *Caller
	expires time.Time // zero: never
}

// Len returns the number of callers.
func (l *Callers) Len() int { return len(l.callers) }

// ByToken returns the caller that a token belongs to, nil if there is none, and when the token expires, which is not looked at
// here; zero: never. Its duration does not depend on how much of
// the token is right.
func (l *Callers) ByToken(text string) (found *Caller, expires time.Time) {
	sum := sha256.Sum256([]byte(text))
	for i := range l.tokens {
		if subtle.ConstantTimeCompare(sum[:], l.tokens[i].sum[:]) == 1 {
			found, expires = l.tokens[i].owner, l.tokens[i].expires
		}
	}
	return found, expires
}

// ByIdentities returns the caller that has one of the identities of a verified certificate: the first in the file if several
// have, nil if none has.
func (l *Callers) ByIdentities(identities []string) *Caller {
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
// name of its subject. A SPIFFE id counts only in an X.509-SVID: the certificate has no other URI and is no authority's
// (X509-SVID standard, sections 2 and 5.2).
func Identities(leaf *x509.Certificate) []string {
	ids := make([]string, 0, len(leaf.DNSNames)+len(leaf.URIs)+1)
	for _, name := range leaf.DNSNames {
		ids = append(ids, "dns:"+name)
	}
	for _, uri := range leaf.URIs {
		if uri.Scheme != "spiffe" || len(leaf.URIs) == 1 && !leaf.IsCA {
			ids = append(ids, "uri:"+uri.String())
		}
	}
	if name := leaf.Subject.CommonName; name != "" {
		ids = append(ids, "cn:"+name)
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

// Denial says why a call is denied. It is an error.
type Denial struct {
	// Authenticated is set if the caller is known and lacks a right (403, PERMISSION_DENIED). Otherwise authentication has
	// failed (401, UNAUTHENTICATED).
	Authenticated bool
	Reason        string // one of the constants below: a label of metrics
	Message       string // for the caller: holds no secret
}

func unauthenticated(reason, message string) *Denial {
	return &Denial{Reason: reason, Message: message}
}

func forbidden(reason, message string) *Denial { return &Denial{true, reason, message} }

// The reasons of a Denial.
const (
	NoCredentials   = "no_credentials"   // neither a token nor a certificate
	ExpiredToken    = "expired_token"    // a token whose time is over
	BadToken        = "bad_token"        // an unknown token, or a malformed header
	UnknownIdentity = "unknown_identity" // a verified certificate whose names no caller has
	WrongRole       = "wrong_role"
	WrongPolicy     = "wrong_policy" // a policy or a namespace that the caller may not use
	WrongPlace      = "wrong_place"  // role admin from another host, without authentication
)

func (d *Denial) Error() string { return d.Message }

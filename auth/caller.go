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

// The roles. RoleOpen is the role of methods and paths that need no authentication.
const (
	RoleOpen Role = 0
	// RoleCheck allows check, acquire, renew, release, reserve, extend, commit and cancel, with the grant's policies
	// and namespaces.
	RoleCheck Role = 1 << 0
	// refund and reset, with the grant's policies and namespaces: gives back what others were charged
	RoleRefund   Role = 1 << 1
	RoleRead     Role = 1 << 2 // status, policies, metrics
	RoleTopology Role = 1 << 3 // see the ring with its hash key, with which a client can aim at partitions
	RoleAdmin    Role = 1 << 4 // change the cluster: the gossip keys
	RoleKeys     Role = 1 << 5 // see the keys in use, which are callers' data, with the grant's policies and namespaces
	// RoleOverrides allows to see and change overrides while nodes run, with the grant's policies.
	RoleOverrides Role = 1 << 7
	// RoleCharge allows to charge costs that are never refused, which can bring any key into debt, with the grant's
	// policies and namespaces.
	RoleCharge Role = 1 << 6
)

// roleNames returns the roles' names in an access file. The index is the bit of the role.
func roleNames() []string {
	return []string{"check", "refund", "read", "topology", "admin", "keys", "charge", "overrides"}
}

// String returns the names of the roles in r, joined by commas; "open" for none.
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

// Caller is an entry of the access file. It never changes.
type Caller struct {
	Name   string // in the file, for logs
	Roles  Role   // of all grants
	grants []grant
}

// grant is some roles, and the policies and namespaces for them.
type grant struct {
	roles                Role
	policies, namespaces patterns
}

// everybody returns the caller for nodes without an access file: it has all roles for all policies and namespaces.
func everybody() *Caller {
	const all = RoleCheck | RoleRefund | RoleRead | RoleTopology | RoleAdmin | RoleKeys | RoleCharge | RoleOverrides
	return &Caller{Name: "everybody", Roles: all, grants: []grant{{all, patterns{""}, patterns{""}}}}
}

// Has says whether the caller has all roles in r. A nil Caller has RoleOpen only.
func (c *Caller) Has(r Role) bool { return r == RoleOpen || c != nil && c.Roles&r == r }

// MayUsePolicy says whether the caller may use a policy in a role.
func (c *Caller) MayUsePolicy(r Role, name string) bool {
	return c.granted(r, func(g grant) patterns { return g.policies }, name)
}

// MayUseNamespace says whether the caller may use inline limits of a namespace in a role; an empty name is "default".
func (c *Caller) MayUseNamespace(r Role, name string) bool {
	return c.granted(r, func(g grant) patterns { return g.namespaces }, cmp.Or(name, "default"))
}

// may says whether the caller may use a target in a role.
func (c *Caller) may(r Role, t *limit.Target) bool {
	if t.Limit != nil {
		return c.MayUseNamespace(r, t.Namespace)
	}
	return c.MayUsePolicy(r, t.Policy)
}

// granted says whether one of the caller's grants has the role and, among its policies or namespaces (of), the name.
func (c *Caller) granted(r Role, of func(grant) patterns, name string) bool {
	return c != nil && slices.ContainsFunc(c.grants, func(g grant) bool { return g.roles&r == r && of(g).match(name) })
}

// patterns are names and prefixes. A name has "=" in front; a prefix has nothing, so that "" matches every name.
type patterns []string

func (p patterns) match(name string) bool {
	return slices.ContainsFunc(p, func(one string) bool {
		exact, is := strings.CutPrefix(one, "=")
		return is && exact == name || !is && strings.HasPrefix(name, one)
	})
}

// Callers is the content of an access file. It never changes, and is safe for concurrent use.
type Callers struct {
	// MetricsOpen makes the metrics readable without authentication.
	MetricsOpen bool
	callers     []*Caller
	tokens      []token        // in no particular order
	identities  map[string]int // index into callers, by identity
}

type token struct {
	sum     [sha256.Size]byte
	owner   *Caller
	expires time.Time // zero: never
}

// Len returns the number of callers.
func (l *Callers) Len() int { return len(l.callers) }

// ByToken returns the caller with a token, or nil, and when the token expires; zero: never. It does not compare that
// with the time. It takes as long for a wrong token as for a right one.
func (l *Callers) ByToken(text string) (found *Caller, expires time.Time) {
	sum := sha256.Sum256([]byte(text))
	for i := range l.tokens {
		if subtle.ConstantTimeCompare(sum[:], l.tokens[i].sum[:]) == 1 {
			found, expires = l.tokens[i].owner, l.tokens[i].expires
		}
	}
	return found, expires
}

// ByIdentities returns the caller that has one of the identities of a verified certificate, or nil. If several callers
// have one, it is the first in the file.
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

// Identities returns the names in a certificate as access files spell them: its subject alternative names and its
// subject's common name. A SPIFFE id counts only in an X.509-SVID, that is, without another URI and not in an
// authority's certificate (X509-SVID standard, sections 2 and 5.2).
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

// NewToken returns a token of 256 random bits. Access files must have its Hash only.
func NewToken() string {
	var b [32]byte
	rand.Read(b[:]) // never fails
	return "weir_" + base64.RawURLEncoding.EncodeToString(b[:])
}

// Hash returns a token's hash as access files have it. It has no salt and is fast, because tokens of NewToken cannot be
// guessed.
func Hash(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hashPrefix + hex.EncodeToString(sum[:])
}

const hashPrefix = "sha256:"

// Denial says why a call is denied. It implements error.
type Denial struct {
	// Authenticated says that the caller is known and lacks a right (403, PERMISSION_DENIED). Otherwise the
	// authentication failed (401, UNAUTHENTICATED).
	Authenticated bool
	Reason        string // one of the constants below; a label of metrics
	Message       string // for the caller; without secrets
}

func unauthenticated(reason, message string) *Denial {
	return &Denial{Reason: reason, Message: message}
}

func forbidden(reason, message string) *Denial { return &Denial{true, reason, message} }

// The reasons of a Denial.
const (
	NoCredentials   = "no_credentials"   // neither a token nor a certificate
	ExpiredToken    = "expired_token"    // a token that has expired
	BadToken        = "bad_token"        // an unknown token, or a malformed header
	UnknownIdentity = "unknown_identity" // a verified certificate whose names no caller has
	WrongRole       = "wrong_role"
	WrongPolicy     = "wrong_policy" // a policy or namespace that the caller may not use
	// without an access file: role admin or overrides from another host without a certificate
	WrongPlace = "wrong_place"
)

func (d *Denial) Error() string { return d.Message }

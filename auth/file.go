package auth

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"go.yaml.in/yaml/v4"

	"github.com/weirlimit/weir/internal/strictyaml"
)

// Bounds on an access file. maxTokens bounds the work of ByToken, which compares all of them.
const (
	MaxFile   = 1 << 20 // bytes
	maxTokens = 1000
)

// Parse reads an access file. file is its name in errors. An empty file has no callers. The error is strictyaml.Errors:
// every mistake, in the order of the file. It never repeats a value that could be a token.
func Parse(file string, data []byte) (*Callers, error) {
	p := &parser{
		Decoder: strictyaml.New(file, data[:min(len(data), MaxFile)]), list: &Callers{identities: make(map[string]int)},
		names: make(map[string]int), hashes: make(map[[sha256.Size]byte]int),
	}
	p.Secret = true
	if len(data) > MaxFile {
		p.Add(1, 1, "", fmt.Sprintf("the file is larger than the %d bytes that are allowed", MaxFile))
	} else {
		p.top(p.Root())
	}
	if err := p.Err(); err != nil {
		return nil, err
	}
	return p.list, nil
}

type parser struct {
	*strictyaml.Decoder
	list   *Callers
	names  map[string]int            // line by name
	hashes map[[sha256.Size]byte]int // line by token
}

// texts calls take with each element of a list of texts.
func (p *parser) texts(list strictyaml.Field, of string, take func(one strictyaml.Field, text string)) {
	for one := range p.Elements(list, of) {
		if text, ok := p.Text(one, 1, MaxFile); ok {
			take(one, text)
		}
	}
}

func (p *parser) top(root strictyaml.Field) {
	f, _ := p.Fields(root, []string{"callers", "metrics"})
	p.list.MetricsOpen = p.Choice(f.Field("metrics"), "read", "open") == "open"
	for caller := range p.Maps(f.Field("callers"), "callers",
		[]string{"name", "tokens", "identities", "roles", "policies", "namespaces", "grants"}) {
		p.caller(caller)
	}
}

func (p *parser) caller(f strictyaml.Fields) {
	c := new(Caller)
	index := len(p.list.callers)
	p.list.callers = append(p.list.callers, c)
	name := p.Required(f, "name", "checkout")
	if text, ok := p.Text(name, 1, 100); ok {
		if line, twice := p.names[text]; twice {
			p.Fail(name.Node, name.Path, "is the name of another caller, on line %d", line)
		}
		c.Name, p.names[text] = text, name.Node.Line
	}
	known := 0 // number of tokens and identities, with invalid ones
	for one := range p.Elements(f.Field("tokens"), "hashes of tokens") {
		known++
		p.token(c, one)
	}
	for one := range p.Elements(f.Field("identities"), "identities") {
		known++
		p.identity(index, one)
	}
	if known == 0 {
		p.Fail(f.At, f.Path, "has neither tokens nor identities: nobody could be this caller")
	}
	for grant := range p.Maps(f.Field("grants"), "grants: roles and what they are for", grantFields) {
		p.grant(c, grant)
	}
	if own := f.Only(grantFields...); len(own) > 0 || len(c.grants) == 0 {
		p.grant(c, f)
	}
}

var grantFields = []string{"roles", "policies", "namespaces"}

// grant reads a grant and adds it to its caller.
func (p *parser) grant(c *Caller, f strictyaml.Fields) {
	var g grant
	p.texts(f.Field("roles"), "roles", func(one strictyaml.Field, text string) {
		i := slices.Index(roleNames(), text)
		if i < 0 {
			p.Fail(one.Node, one.Path, "there is no role %s; there are %s", strictyaml.Show(text),
				strings.Join(roleNames(), ", "))
			return
		}
		g.roles |= 1 << i
	})
	g.policies, g.namespaces = p.patterns(f.Field("policies"), "policies"),
		p.patterns(f.Field("namespaces"), "namespaces")
	switch scoped := g.roles&(RoleCheck|RoleRefund|RoleKeys|RoleCharge|RoleOverrides) != 0; {
	case g.roles == 0:
		p.Fail(f.At, f.Path+".roles", "is missing: give one or more of %s", strings.Join(roleNames(), ", "))
	case scoped && len(g.policies)+len(g.namespaces) == 0:
		p.Fail(f.At, f.Path+".policies",
			`is missing: give policies ("login", "partner-*", "*"), or namespaces of inline limits`)
	case !scoped && len(g.policies)+len(g.namespaces) != 0:
		p.Fail(f.At, f.Path+".roles", "has none that uses policies or namespaces: leave those out")
	}
	c.Roles |= g.roles
	c.grants = append(c.grants, g)
}

// token reads the hash of a caller's token, with or without its expiry.
func (p *parser) token(c *Caller, one strictyaml.Field) {
	var expires time.Time
	if one.Node.Kind == yaml.MappingNode {
		f, _ := p.Fields(one, []string{"hash", "expires"})
		one, expires = p.Required(f, "hash", "sha256:…, as weir token prints it"), p.instant(f.Field("expires"))
	}
	text, ok := p.Text(one, 1, MaxFile)
	if !ok {
		return
	}
	var sum [sha256.Size]byte
	digits, ok := strings.CutPrefix(text, hashPrefix)
	raw, err := hex.DecodeString(digits)
	if !ok || err != nil || len(raw) != len(sum) {
		p.Fail(one.Node, one.Path, "must be the hash of a token, as weir token prints it, and not the token itself")
		return
	}
	copy(sum[:], raw)
	if line, twice := p.hashes[sum]; twice {
		p.Fail(one.Node, one.Path, "is given twice, first on line %d", line)
		return
	}
	if sum == sha256.Sum256(nil) {
		p.Fail(one.Node, one.Path, "is the hash of nothing")
		return
	}
	if p.hashes[sum] = one.Node.Line; len(p.hashes) == maxTokens+1 {
		p.Fail(one.Node, one.Path, "there are more than %d tokens", maxTokens)
	}
	p.list.tokens = append(p.list.tokens, token{sum, c, expires})
}

// instant reads a date, which means its first moment in UTC, or an instant of RFC 3339; zero when it is missing.
func (p *parser) instant(f strictyaml.Field) time.Time {
	if f.Node == nil {
		return time.Time{}
	}
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(layout, f.Node.Value); err == nil && f.Node.Kind == yaml.ScalarNode {
			return t
		}
	}
	p.Fail(f.Node, f.Path, "must be an instant such as 2027-01-31T12:00:00Z, or a date such as 2027-01-31")
	return time.Time{}
}

func (p *parser) identity(index int, one strictyaml.Field) {
	text, ok := p.Text(one, 1, MaxFile)
	if !ok {
		return
	}
	kind, name, _ := strings.Cut(text, ":")
	if kind == "spiffe" {
		kind, name, text = "uri", text, "uri:"+text
	}
	if strings.HasPrefix(name, "spiffe:") && kind == "uri" {
		if _, err := spiffeid.FromString(name); err != nil {
			p.Fail(one.Node, one.Path, "is no SPIFFE id, as spiffe://example.org/checkout is: %v", err)
			return
		}
	}
	if !slices.Contains([]string{"dns", "uri", "cn"}, kind) || name == "" {
		p.Fail(one.Node, one.Path, `must begin with dns:, uri:, cn: or spiffe://, as in "dns:checkout.shop.svc"`)
		return
	}
	if strings.Contains(name, "*") {
		p.Fail(one.Node, one.Path, "names one identity: * in a certificate stands for itself")
		return
	}
	if _, twice := p.list.identities[text]; twice {
		p.Fail(one.Node, one.Path, "is given twice")
		return
	}
	p.list.identities[text] = index
}

// patterns reads names, and prefixes that end in *.
func (p *parser) patterns(f strictyaml.Field, of string) (list patterns) {
	p.texts(f, of, func(one strictyaml.Field, text string) {
		prefix, isPrefix := strings.CutSuffix(text, "*")
		switch {
		case strings.Contains(prefix, "*"):
			p.Fail(one.Node, one.Path, "* belongs at the end only, where it stands for anything")
		case isPrefix && strings.HasPrefix(prefix, "="):
			p.Fail(one.Node, one.Path, "no name begins with =")
		case isPrefix:
			list = append(list, prefix)
		default:
			list = append(list, "="+text)
		}
	})
	return list
}

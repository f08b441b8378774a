package auth

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"go.yaml.in/yaml/v3"
)

// Bounds on a file. A token is compared with all of them at each request.
const (
	MaxFile   = 1 << 20 // bytes
	maxTokens = 1000
	maxErrors = 100
)

// Error is one mistake in an access file.
type Error struct {
	File         string
	Line, Column int    // from 1
	Field        string // its path, such as "callers[0].roles"; empty when the mistake is not in a field
	Message      string
}

// Error returns "file:line:column: field: message".
func (e *Error) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Message)
	}
	return fmt.Sprintf("%s:%d:%d: %s: %s", e.File, e.Line, e.Column, e.Field, e.Message)
}

// Parse reads an access file's content. file is its name in errors. An empty file has no callers. The error is of *Error
// joined, in the order of the file; it never repeats what stands in the place of a token.
func Parse(file string, data []byte) (*Callers, error) {
	p := &parser{file: file, list: &Callers{identities: make(map[string]int)}, names: make(map[string]int), hashes: make(map[[sha256.Size]byte]int)}
	if root := p.root(data); root != nil {
		p.top(root)
	}
	if len(p.errs) > 0 {
		return nil, errors.Join(p.errs...)
	}
	return p.list, nil
}

type parser struct {
	file   string
	list   *Callers
	names  map[string]int            // line by name
	hashes map[[sha256.Size]byte]int // line by token
	errs   []error
}

func (p *parser) fail(n *yaml.Node, field, format string, args ...any) {
	if len(p.errs) < maxErrors {
		p.errs = append(p.errs, &Error{p.file, max(n.Line, 1), max(n.Column, 1), field, fmt.Sprintf(format, args...)})
	}
}

// root returns the one document, nil when it is empty or cannot be read.
func (p *parser) root(data []byte) (root *yaml.Node) {
	start := &yaml.Node{}
	// A malformed file must not end a process that is only reloading it, whatever it does to the YAML library.
	defer func() {
		if r := recover(); r != nil {
			p.fail(start, "", "is not valid YAML: the parser gave up")
			root = nil
		}
	}()
	if len(data) > MaxFile {
		p.fail(start, "", "the file is larger than the %d bytes that are allowed", MaxFile)
		return nil
	}
	var doc, second yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(data))
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		var line int
		text := strings.TrimPrefix(err.Error(), "yaml: ")
		if _, scanned := fmt.Sscanf(text, "line %d:", &line); scanned == nil {
			_, text, _ = strings.Cut(text, ": ")
		}
		p.fail(&yaml.Node{Line: line}, "", "is not valid YAML near here: %s", text)
		return nil
	}
	if err := d.Decode(&second); !errors.Is(err, io.EOF) {
		p.fail(&second, "", "a second YAML document, or what is not YAML, follows the first: put all callers into one")
		return nil
	}
	if len(doc.Content) == 0 || isNull(doc.Content[0]) {
		return nil
	}
	return doc.Content[0]
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// fields calls f for each field of a map, which must be among the known ones, once each and with a value.
func (p *parser) fields(n *yaml.Node, path string, known []string, f func(name, path string, value *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode {
		p.fail(n, path, "must be a map of fields (%s)", strings.Join(known, ", "))
		return false
	}
	seen := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		at := key.Value
		if path != "" {
			at = path + "." + at
		}
		switch {
		case key.Kind != yaml.ScalarNode || !slices.Contains(known, key.Value):
			p.fail(key, path, "there is no field %q here; there are %s", clip(key.Value), strings.Join(known, ", "))
		case seen[key.Value] != 0:
			p.fail(key, at, "is given twice, first on line %d", seen[key.Value])
		case isNull(value):
			p.fail(key, at, "has no value: give it one or remove the field")
		default:
			f(key.Value, at, value)
		}
		seen[key.Value] = max(key.Line, 1)
	}
	return true
}

// texts calls f for each element of a list of texts.
func (p *parser) texts(n *yaml.Node, path, of string, f func(path, text string, at *yaml.Node)) {
	if n.Kind != yaml.SequenceNode {
		p.fail(n, path, "must be a list of %s", of)
		return
	}
	for i, e := range n.Content {
		at := fmt.Sprintf("%s[%d]", path, i)
		if text, ok := p.text(e, at); ok {
			f(at, text, e)
		}
	}
}

// text reads a text. What is there instead is not repeated: it may be a secret.
func (p *parser) text(n *yaml.Node, path string) (string, bool) {
	if n.Kind != yaml.ScalarNode || n.Tag != "!!str" || n.Value == "" {
		p.fail(n, path, "must be text that is not empty; quote what YAML takes for something else")
		return "", false
	}
	return n.Value, true
}

func (p *parser) top(root *yaml.Node) {
	p.fields(root, "", []string{"callers", "metrics"}, func(name, path string, value *yaml.Node) {
		switch name {
		case "metrics":
			switch text, ok := p.text(value, path); {
			case ok && text == "open":
				p.list.MetricsOpen = true
			case ok && text != "read":
				p.fail(value, path, "must be open (to everybody) or read (to that role, which is the default)")
			}
		case "callers":
			if value.Kind != yaml.SequenceNode {
				p.fail(value, path, "must be a list of callers")
				return
			}
			for i, n := range value.Content {
				p.caller(n, fmt.Sprintf("callers[%d]", i))
			}
		}
	})
}

func (p *parser) caller(n *yaml.Node, path string) {
	c := new(Caller)
	index := len(p.list.callers)
	p.list.callers = append(p.list.callers, c)
	known := 0 // tokens and identities, the wrong ones too
	own := &granting{at: n, path: path}
	ok := p.fields(n, path, []string{"name", "tokens", "identities", "roles", "policies", "namespaces", "grants"}, func(name, path string, value *yaml.Node) {
		switch name {
		case "name":
			if c.Name, _ = p.text(value, path); len(c.Name) > 100 {
				p.fail(value, path, "is longer than 100 bytes")
			}
			if line, twice := p.names[c.Name]; twice && c.Name != "" {
				p.fail(value, path, "is the name of another caller, on line %d", line)
			}
			p.names[c.Name] = value.Line
		case "tokens":
			known += p.tokens(c, value, path)
		case "identities":
			p.texts(value, path, "identities", func(path, text string, at *yaml.Node) {
				known++
				p.identity(index, path, text, at)
			})
		case "grants":
			p.grants(c, value, path)
		default:
			p.granting(own, name, path, value)
		}
	})
	switch {
	case !ok:
	case c.Name == "":
		p.fail(n, path+".name", "is missing: name the caller, as logs shall do")
	case known == 0:
		p.fail(n, path, "has neither tokens nor identities: nobody could be this caller")
	case own.given || len(c.grants) == 0:
		p.grant(c, own)
	}
}

// granting is a grant that is being read, with where it stands.
type granting struct {
	grant
	given bool // some field of it
	at    *yaml.Node
	path  string
}

// grants reads a list of roles for policies and namespaces of their own.
func (p *parser) grants(c *Caller, n *yaml.Node, path string) {
	if n.Kind != yaml.SequenceNode {
		p.fail(n, path, "must be a list of grants: roles, and the policies and namespaces that they are for")
		return
	}
	for i, e := range n.Content {
		g := &granting{at: e, path: fmt.Sprintf("%s[%d]", path, i)}
		if p.fields(e, g.path, []string{"roles", "policies", "namespaces"}, func(name, path string, value *yaml.Node) { p.granting(g, name, path, value) }) {
			p.grant(c, g)
		}
	}
}

// granting reads one field of a grant.
func (p *parser) granting(g *granting, name, path string, value *yaml.Node) {
	g.given = true
	switch name {
	case "roles":
		p.texts(value, path, "roles", func(path, text string, at *yaml.Node) {
			i := slices.Index(roleNames(), text)
			if i < 0 {
				p.fail(at, path, "there is no role %q; there are %s", clip(text), strings.Join(roleNames(), ", "))
				return
			}
			g.roles |= 1 << i
		})
	case "policies":
		g.policies = p.patterns(value, path, "policies")
	case "namespaces":
		g.namespaces = p.patterns(value, path, "namespaces")
	}
}

// grant checks a grant and gives it to its caller.
func (p *parser) grant(c *Caller, g *granting) {
	switch scoped := g.roles&(RoleCheck|RoleRefund|RoleKeys|RoleCharge) != 0; {
	case g.roles == 0:
		p.fail(g.at, g.path+".roles", "is missing: give one or more of %s", strings.Join(roleNames(), ", "))
	case scoped && len(g.policies)+len(g.namespaces) == 0:
		p.fail(g.at, g.path+".policies", `is missing: say which policies the caller may use, by their names or how they begin ("login", "partner-*", "*"), or namespaces of limits that it sends along`)
	case !scoped && len(g.policies)+len(g.namespaces) != 0:
		p.fail(g.at, g.path+".roles", "has none that uses policies or namespaces: add check, refund, keys or charge, or leave them out")
	}
	c.Roles |= g.roles
	c.grants = append(c.grants, g.grant)
}

// tokens reads the hashes of a caller's tokens, each alone or with when it expires, and returns how many there are, the wrong ones
// too.
func (p *parser) tokens(c *Caller, n *yaml.Node, path string) int {
	if n.Kind != yaml.SequenceNode {
		p.fail(n, path, "must be a list of hashes of tokens")
		return 0
	}
	for i, e := range n.Content {
		at := fmt.Sprintf("%s[%d]", path, i)
		if e.Kind != yaml.MappingNode {
			if text, ok := p.text(e, at); ok {
				p.token(c, at, text, e, time.Time{})
			}
			continue
		}
		var hash string
		var expires time.Time
		where := e
		ok := p.fields(e, at, []string{"hash", "expires"}, func(name, path string, value *yaml.Node) {
			switch name {
			case "hash":
				hash, _ = p.text(value, path)
				where = value
			case "expires":
				expires = p.instant(value, path)
			}
		})
		switch {
		case ok && hash == "" && where == e:
			p.fail(e, at+".hash", "is missing: give the hash of the token")
		case ok && hash != "":
			p.token(c, at+".hash", hash, where, expires)
		}
	}
	return len(n.Content)
}

// instant reads a date, from whose first moment in UTC it is, or an instant as RFC 3339 has it.
func (p *parser) instant(n *yaml.Node, path string) time.Time {
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(layout, n.Value); err == nil && n.Kind == yaml.ScalarNode {
			return t
		}
	}
	p.fail(n, path, "must be an instant such as 2027-01-31T12:00:00Z, or a date such as 2027-01-31, from whose beginning in UTC on the token does not count")
	return time.Time{}
}

func (p *parser) token(c *Caller, path, text string, at *yaml.Node, expires time.Time) {
	var sum [sha256.Size]byte
	digits, ok := strings.CutPrefix(text, hashPrefix)
	if n, err := hex.Decode(sum[:], []byte(digits[:min(len(digits), 2*len(sum))])); !ok || err != nil || n != len(sum) || len(digits) != 2*len(sum) {
		p.fail(at, path, "must be the hash of a token, sha256: and 64 hexadecimal digits, as weir token prints it; the token itself does not belong here")
		return
	}
	if line, twice := p.hashes[sum]; twice {
		p.fail(at, path, "is given twice, first on line %d", line)
		return
	}
	if sum == sha256.Sum256(nil) {
		p.fail(at, path, "is the hash of nothing")
		return
	}
	if p.hashes[sum] = at.Line; len(p.hashes) == maxTokens+1 {
		p.fail(at, path, "there are more than %d tokens", maxTokens)
	}
	p.list.tokens = append(p.list.tokens, token{sum, c, expires})
}

func (p *parser) identity(index int, path, text string, at *yaml.Node) {
	kind, name, _ := strings.Cut(text, ":")
	if kind == "spiffe" {
		kind, name, text = "uri", text, "uri:"+text
	}
	if strings.HasPrefix(name, "spiffe:") && kind == "uri" {
		if _, err := spiffeid.FromString(name); err != nil {
			p.fail(at, path, "is no SPIFFE id, as spiffe://example.org/checkout is: %v", err)
			return
		}
	}
	if !slices.Contains([]string{"dns", "uri", "cn"}, kind) || name == "" {
		p.fail(at, path, `must begin with dns: or uri: (a subject alternative name), cn: (the subject's common name) or spiffe://, as in "dns:checkout.shop.svc"`)
		return
	}
	if strings.Contains(name, "*") {
		p.fail(at, path, "names one identity; * stands for itself in a certificate and would match nothing else")
		return
	}
	if _, twice := p.list.identities[text]; twice {
		p.fail(at, path, "is given twice")
		return
	}
	p.list.identities[text] = index
}

// patterns reads names and prefixes, which end in *.
func (p *parser) patterns(n *yaml.Node, path, of string) patterns {
	var list patterns
	p.texts(n, path, of, func(path, text string, at *yaml.Node) {
		prefix, isPrefix := strings.CutSuffix(text, "*")
		switch {
		case strings.Contains(prefix, "*"):
			p.fail(at, path, "* belongs at the end only, where it stands for anything")
		case isPrefix && strings.HasPrefix(prefix, "="):
			p.fail(at, path, "no name begins with =")
		case isPrefix:
			list = append(list, prefix)
		default:
			list = append(list, "="+text)
		}
	})
	return list
}

// clip keeps what was written short enough for a message.
func clip(s string) string {
	if len(s) > 40 {
		return s[:40] + "…"
	}
	return s
}

"""Bodies of a `with`, and the places in which one can stand. Each is run in place and lifted, and must do the same."""

import re


def _by_name(text: str) -> dict[str, str]:
    """Splits a text at its `# -- name` lines."""
    parts = re.split(r"^# -- (.+)\n", text, flags=re.MULTILINE)[1:]
    return {name: part.rstrip() for name, part in zip(parts[::2], parts[1::2], strict=True)}


BODIES = _by_name(
    r'''
# -- assignment
x = (outer * 2).save()

# -- branches that are never compiled
if 1 % 2:
    x = [outer].save()
else:
    y = sum(outer + i for i in range(2))
if 0:
    z = lambda: outer

# -- annotated
x: int = (outer + 1).save()

# -- tuple pairwise
x, y = (outer + 1).save(), (outer + 2).save()

# -- tuple taken apart
x, (y, *z) = (1, (2, 3, 4)).save()

# -- nested targets
(x, y), z = (1 .save(), 2), [3].save()

# -- chained
x = y = [outer].save()

# -- chained with a tuple
(x, y) = z = (outer, 2).save()

# -- walrus
if (x := (outer > 1).save()):
    y = 'big'.save()

# -- bare
x = outer
x += 1
x.save()

# -- bare of an outside name
outer.save()

# -- two bare
x, y = 1, 2
x.save(), y.save()

# -- either
x = 1 .save() if outer > 1 else 2 .save()

# -- none
x = None
x.save()

# -- list that grows
x = list().save()
for i in range(3):
    x.append(i * outer)

# -- in a loop
for i in range(3):
    x = (i + outer).save()

# -- while with break
x = 0
while True:
    x += 1
    if x > outer:
        break
    else:
        continue
x.save()

# -- for with else
for i in range(2):
    pass
else:
    x = i.save()

# -- rebinds an outside name
outer = outer + 1
outer.save()

# -- adds to an outside number
outer += 5
x = outer.save()
outer.save()

# -- reads, then binds
x = outer.save()
outer = 3

# -- binds on one way only
if flag:
    outer = 7
x = outer.save()

# -- binds in a try
try:
    outer = missing_name
except NameError as error:
    x = str(error).save()
y = outer.save()

# -- binds in finally
try:
    x = 1
finally:
    x = (x + outer).save()

# -- try with else
try:
    x = 1
except ValueError:
    x = 2
else:
    x = outer
x.save()

# -- deletes
x = 1
del x
x = outer.save()

# -- comprehensions
x = [a * outer for a in range(3) if a].save()
y = {a: outer for a in 'ab'}.save()
z = {a for a in 'a'}.save()

# -- nested comprehension
x = [[outer + a + b for a in range(b)] for b in range(3)].save()

# -- walrus in a comprehension
x = [(y := a) for a in range(3)].save()
y.save()

# -- generator
x = sum(a * outer for a in range(4)).save()

# -- lambda
double = lambda a, b=outer: a * b + outer
x = double(3).save()

# -- inner function
def add(a, *rest, b=outer, **more):
    c = a + b + outer
    return c
x = add(1).save()

# -- recursive function
def fact(n):
    return 1 if n < 2 else n * fact(n - 1)
x = fact(5).save()

# -- generator function
def count():
    yield from range(outer)
    return
x = list(count()).save()

# -- function before its variable
def get():
    return later
later = outer
x = get().save()

# -- decorated
@twice
def f():
    return outer
x = f().save()

# -- decorated first, at the top
@twice
def f(): return 3
x = f().save()

# -- inner class
class A:
    value = outer
    def get(self):
        return self.value + outer
x = A().get().save()

# -- class later
y = 1
class A:
    def get(self):
        return 5
x = A().get().save()

# -- class with private names
class A:
    __p = 3
    def get(self):
        return self.__p
x = A().get().save()

# -- inner with
with nullcontext(outer) as x, nullcontext(2) as y:
    z = (x + y).save()
x.save()

# -- f-string
x = f'{outer!r:>{outer + 3}} {outer=}'.save()

# -- multi-line string
x = """a
  b
c""".save()

# -- docstring first
"""words"""
x = outer.save()

# -- import
import math as m, os.path
from math import pi
x = m.floor(pi).save()
y = os.path.join('a', 'b').save()

# -- match
match [outer, 2, {'k': 1, 'l': 2}]:
    case [a, *rest] if a > 0:
        x = (a, rest).save()
    case _:
        x = 0 .save()

# -- match mapping
match {'k': 1, 'l': 2}:
    case {'k': a, **rest}:
        x = (a, rest).save()

# -- assert
assert outer > 0, 'no'
x = outer.save()

# -- star arguments
x = dict(*[[('a', outer)]], **{'b': 2}).save()

# -- slices
x = list(range(9))
x[2:5] = [outer]
x.save()

# -- augmented parts
x = [1, 2]
x[0] += outer
x += [3]
x.save()

# -- conditional first binding
for i in range(3):
    if i == 0:
        x = list().save()
    x.append(i)

# -- nonlocal in a function
n = 0
def up():
    nonlocal n
    n += outer
up()
n.save()

# -- global lookup
x = helper(outer).save()

# -- semicolons
x = 1; y = (x + outer).save()

# -- comment first
# nothing

x = outer.save()

# -- continued lines
x = (outer +
     1).save(
)

# -- raises and catches
x = []
try:
    x.append(1 / (outer - outer))
except ZeroDivisionError:
    x.append('caught')
x.save()

# -- pass only
pass

# -- a method called save with arguments
x = keeper.save('path').save()
'''
)

# `outer` is 3 and `flag` is False in each of them; {block} is the whole `with`.
PLACES = _by_name(
    r"""
# -- module
outer = 3
flag = False
{block}
result = dict(locals())

# -- function
def f(outer, flag):
    {block}
    return dict(locals())
result = f(3, False)

# -- closure
def g():
  outer = 3
  flag = False
  def f():
    nonlocal outer
    flag
    {block}
    return dict(locals())
  return f()
result = g()

# -- method
class C:
  def f(self, outer, flag):
    {block}
    del self
    return dict(locals())
result = C().f(3, False)

# -- class
class C:
    outer = 3
    flag = False
    {block}
result = dict(vars(C))

# -- async
async def f(outer, flag):
    {block}
    return dict(locals())
result = asyncio.run(f(3, False))

# -- generator
def f(outer, flag):
    {block}
    yield dict(locals())
result = next(f(3, False))

# -- in a finally
def f(outer, flag):
    try:
        pass
    finally:
        {block}
    return dict(locals())
result = f(3, False)
"""
)
